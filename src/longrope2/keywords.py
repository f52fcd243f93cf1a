"""The options of the Python functions, with their types; `make reference` writes this file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict


class RescaleOptions(TypedDict, total=False):
    current_length: int | None
    low_rotations: float
    high_rotations: float
    fast_rotations: float
    slow_rotations: float
    truncate: bool
    critical_dimension: int | None
    onset: int | None
    base: float | None
    right_factors: Sequence[float] | None
    attention_factor: float


class SearchOptions(TypedDict, total=False):
    method: Literal["longrope2", "longrope"]
    dimensions: Literal["critical", "all"]
    lower: float
    upper: float
    grid: float
    mutation_probability: float
    space: Literal["paper", "wide"]
    attention_factor: float | Literal["released", "searched"]
    objective: Literal["needle", "plain"]
    depth: float | Sequence[float]
    keys: int
    documents: int
    held_out: int
    books: str | Path | None
    staged: bool
    algorithm: Literal["surrogate", "evolution"]
    population: int
    iterations: int
    parents: int
    mutations: int
    crossovers: int
    race: Literal["statistical", "exact", "off"]
    race_confidence: float
    seed: int
    compiled: bool
    tensor_parallel: int


class TrainOptions(TypedDict, total=False):
    steps: int | None
    batch_rows: int | None
    learning_rate: float
    warmup_steps: int | None
    betas: Sequence[float]
    weight_decay: float
    gradient_clip: float
    save_every: int
    keep: int
    seed: int
    window: Literal["mixed", "single"]
    long_row_mask: Literal["full", "document"]
    positions: Literal["row", "pose", "random"]
    lora: int | None
    also: Sequence[Literal["norms", "embeddings"]]
    freeze: Sequence[str]
    evaluate_every: int
    evaluate_documents: int
    books: str | Path | None
    sequence_parallel: int
    memory: Literal["auto", "plain", "host", "small", "least", "4bit"]
    recompute: bool | None
    compiled: bool
    save_dtype: Literal["bfloat16", "float16", "float32"]


class EvaluateOptions(TypedDict, total=False):
    lengths: Sequence[int | str]
    samples: int | None
    tasks: Sequence[str]
    data: str | Path | None
    books: str | Path | None
    judge: str | Path | None
    chat: bool
    seed: int
    beyond_window: bool
    batch_tokens: int | str | None


class ExportOptions(TypedDict, total=False):
    profile: Literal["dual", "static-long"] | Literal["auto"]
    dtype: Literal["float32", "float16", "bfloat16", "q8_0"] | None
    fold_temperature: bool
    format: Literal["huggingface", "gguf"]
    results: str | Path | None
    extend_again: bool
    force: bool
