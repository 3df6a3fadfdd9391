"""Answers of a given form: grammars are compiled under limits, and allow or forbid each token before it is drawn."""
