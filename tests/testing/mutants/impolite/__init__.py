"""A package whose backends are right, and whose imports are not."""
