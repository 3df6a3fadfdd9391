"""Token mixers other than softmax attention: recurrences over the forest of a bin's tokens."""
