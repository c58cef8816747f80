"""OpenAI's API: completions, chats, embeddings and models, from a body to the engine and back."""
