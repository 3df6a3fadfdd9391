"""Tokenizers, chat templates, units of tokens from examples, and the report on a dataset's rows."""
