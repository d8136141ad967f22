"""When a measurement is precise enough to stop."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Stop at a narrow interval, after a time, or after a number of replicates."""

    target_half_width: float = 0.005  #: Relative half-width of the interval at which to stop.
    min_replicates: int = 6
    """Fewest replicates. Because the width decides when to stop, a 99 % interval misses the true
    ratio in up to 1.9 % of measurements with normal noise (1.7 % with a minimum of 8)."""
    max_replicates: int = 32  #: Most replicates.
    rounds_per_replicate: int = 2
    """Rounds in each replicate. Half of the noise comes from the memory layout, which only a new
    replicate changes; building and checking a replicate takes as long as two rounds."""
    scores_per_replicate: int = 1  #: Scores of each arm in each replicate.
    time_budget_s: float = 0.6  #: Seconds after which to stop.
    extra_replicates: int = 2
    """Replicates beyond the minimum if an interval is still :data:`WIDE` when time is up."""
    undecided_replicates: int = 16
    """Replicates that follow, once, if the interval leaves it open whether a requirement is met.
    They cost less than a second attempt, which begins with the check of the results. With two looks
    at a 99 % interval, a claim whose true ratio is its requirement is met in up to 1 of 100 runs
    instead of 1 of 200. More looks would add up."""
    undecided_s: float = 6.0  #: Seconds after which these end.


STANDARD = StoppingRule()
PATIENT = StoppingRule(
    rounds_per_replicate=3, scores_per_replicate=3, time_budget_s=1.8, extra_replicates=8
)
"""The rule of a second attempt. The median of three rounds ignores a disturbed round, which would
otherwise make the interval of a few slow calls too wide for a verdict. Slow calls on a noisy host
get more replicates."""
QUICK = StoppingRule(
    target_half_width=0.01,
    min_replicates=5,
    max_replicates=12,
    time_budget_s=0.4,
    undecided_replicates=0,
)

WIDE = 0.05  #: Relative half-width above which an interval is wide.
