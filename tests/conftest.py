"""One thread for every test: two cores are shared by several processes, and sums stay alike."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
