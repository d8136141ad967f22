"""Results as people read them: terminal, Markdown, HTML."""
