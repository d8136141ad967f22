"""What figures mean: pure questions and answers, without a clock, a GPU or a file."""
