"""The page that draws the curves of one or more runs."""
