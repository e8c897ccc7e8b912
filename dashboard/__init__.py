"""The chat page, its live panels and the step inspector."""
