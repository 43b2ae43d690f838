"""Saved training states: one file a writing rank, named by Hugging Face names, loadable anywhere.

manifest     what a checkpoint holds, and whether it fits a model
folder       where checkpoints lie, and how one appears at once or not at all
tensor_file  safetensors written one tensor at a time, with checksum
state        a rank's share of weights and optimizer states
save, load   the two directions; `engine` gives them DeepSpeed's signatures
export       a Hugging Face folder from a checkpoint, without any engine
"""
