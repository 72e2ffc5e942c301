"""The checks of a rule: what they measure, the inputs and settings that they try, and the table of their limits."""
