"""Lengths of prompts and answers in the Azure LLM inference trace of 2023, conversations (CC-BY).

https://github.com/Azure/AzurePublicDataset/blob/master/AzureLLMInferenceDataset2023.md
"""

import numpy as np

PERCENTS = 0, 1, 5, 10, 25, 40, 50, 60, 75, 90, 95, 99, 100
PROMPTS = 2, 29, 181, 207, 396, 703, 1020, 1071, 1189, 2734, 4083, 4142, 14050
"""Tokens of a prompt at these percentiles."""
ANSWERS = 7, 16, 41, 54, 85, 103, 129, 177, 395, 424, 451, 601, 1000
"""Tokens of an answer at these percentiles."""


def tokens_at(percents: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """Return the tokens at percentiles; their logarithms are interpolated."""
    return np.exp(np.interp(percents, PERCENTS, np.log(tokens)))
