"""Saved training states: one file a writing rank, named by Hugging Face names, loadable anywhere.

manifest     what a checkpoint holds, and whether it fits a model
folder       where checkpoints lie, and how one appears at once or not at all
tensor_file  safetensors written one tensor at a time, with checksum
state        a rank's share of weights and optimizer states
save, load   the two directions
checkpointer both for a run as a whole: also schedule, counters and the position in the data
routine      when training saves, and where it goes on
export       a Hugging Face folder from a checkpoint, without any engine
"""
