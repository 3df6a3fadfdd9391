"""From examples to token ids: tokenizers, chat templates, and the report of what became of the rows."""
