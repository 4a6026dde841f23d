"""A model spread over processes of one host, tensor parallel: rank 0 schedules, all compute."""
