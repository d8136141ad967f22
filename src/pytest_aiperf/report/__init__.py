"""Reports of results: terminal, Markdown and HTML."""
