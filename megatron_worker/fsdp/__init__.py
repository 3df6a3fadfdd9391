"""The FSDP engine: transformers' own model, sharded by torch's fully_shard, on CPU with gloo and on CUDA with NCCL."""
