"""The model gateway: agents ask it as they would ask OpenAI, and every token is recorded where it was sampled."""
