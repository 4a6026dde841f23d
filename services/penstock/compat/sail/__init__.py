"""Service that SAIL's EngineLLM (`penstock_client.compat.sail`) has in its own process where no server is told."""
