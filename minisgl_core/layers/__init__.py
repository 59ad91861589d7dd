"""Tensor-parallel layers. Model plugins may import this package in addition to ``plugin_api``."""

from .attention import Attention
from .base import Layer, OpList, children
from .embedding import LMHead, VocabEmbedding
from .linear import ColumnMergedLinear, GatedLinear, Linear, QKVLinear, ReplicatedLinear, RowLinear, split_evenly
from .mlp import DenseMLP, Experts, SparseMLP
from .norm import RMSNorm
from .rotary import rotary_table

__all__ = [
    "Attention",
    "ColumnMergedLinear",
    "DenseMLP",
    "Experts",
    "GatedLinear",
    "LMHead",
    "Layer",
    "Linear",
    "OpList",
    "QKVLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RowLinear",
    "SparseMLP",
    "VocabEmbedding",
    "children",
    "rotary_table",
    "split_evenly",
]
