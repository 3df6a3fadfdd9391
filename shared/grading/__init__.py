"""Graders as users write them: their kinds, expressions and templates."""
