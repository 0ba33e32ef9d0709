"""Models in lm-eval, EleutherAI's Language Model Evaluation Harness, whose tasks then measure them as others' are."""
