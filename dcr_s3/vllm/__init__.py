"""vLLM as a target. Nothing here imports vllm until it runs inside vllm."""
