"""OpenAI's API, `/v1`: files, chat, graders."""
