"""Jobs of the command line: comparison, evaluation, fine-tuning, diagnosis, quantisation."""
