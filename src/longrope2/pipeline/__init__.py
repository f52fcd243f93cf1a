"""From a base model to a served long-context model: stages in order, each skipped when its result is there."""
