"""Questions to published models, and the samplers that answer them."""
