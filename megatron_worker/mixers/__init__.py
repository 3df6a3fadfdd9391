"""What mixes the tokens of a layer, apart from softmax attention: recurrences over the forest of a bin's tokens."""
