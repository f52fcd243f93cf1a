"""What a run found, as one page that needs nothing but itself, with its figures and their data beside it."""
