"""What a model can do at which length: samples, answers and scores."""
