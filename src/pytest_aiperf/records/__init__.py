"""What is kept: journals, results, expectations, and what changed between them."""
