"""Extended models for the engines people serve with, and the proof that each one reads them right."""
