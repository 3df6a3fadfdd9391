"""An RL run's own rollouts: sampling, grading, evaluation."""
