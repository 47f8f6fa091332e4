"""What is put on PYTHONPATH where SGLang runs on a machine without CUDA."""
