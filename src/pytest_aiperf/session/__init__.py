"""One pytest session that measures: what it knows, what tests get, what becomes of them."""
