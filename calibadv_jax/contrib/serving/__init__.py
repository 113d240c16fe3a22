"""The agent for people and programs: a web page, and OpenAI's chat completions over HTTP."""
