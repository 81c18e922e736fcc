"""What every result file says about where its numbers come from: the model and the data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model as it was measured.

    Attributes:
        name: The short name that reports use.
        source: What the user gave: a folder, a hub id, a shipped name.
        sha256: Hash of the weights, hex.
        parameters: Number of weights, tied ones once.
        dtype, device: As computed with, e.g. `float32`, `cpu`.
        maps: Attention maps per head: 2 for a differential head, else 1.
        layers, heads, kv_heads, head_dim, hidden_size: 0 where the model does not say; of the last
            stage where stages differ, of the part that reads the main input where there are more.
        warnings: One sentence each, e.g. that the checkpoint was already quantized.
        modality: What the model reads: `text`, `image`, `audio` or `other`.
    """

    name: str
    source: str
    sha256: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    maps: int
    hidden_size: int
    warnings: list[str] = field(default_factory=list)
    modality: str = "text"
    is_encoder_decoder: bool = False


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """The slice of text, or of other samples, that a number was computed from.

    Attributes:
        source: What the user gave: a named set, a file, a folder.
        sha256: Hash of the token ids of the slice (of the input arrays, for other samples), hex.
        sequences: Number of blocks; `seq_len` tokens each, or fewer where they are padded. Number
            of samples where they are no text; `seq_len` is then 0.
        tokens: Real tokens in all, without padding; the number of samples where they are no text.
        bos: `auto`, `always` or `never`, as asked for.
        block_hashes: One short hash a block; two slices with none in common are disjoint.
        skipped_blocks: Blocks of the source before this slice.
        python: Version of Python, since `pydoc` differs between them.
        modality: What the samples are: `text`, `image`, `audio` or `other`.
        preprocessing: What was done to each sample before the model saw it; empty for text.
        named_set: Name of the calibration set; `set_sha256`: hash of its content, as its manifest
            says. Both empty where the source is no named set.
        licence: Of the data, as the manifest says; empty where it is not known.
        shared_blocks: Blocks that it shares with the slice that it should be disjoint from, where
            --allow-overlap let them pass.
        warnings: One sentence each, e.g. that `pydoc` has the text of another version of Python.
    """

    source: str
    sha256: str
    sequences: int
    seq_len: int
    tokens: int
    batch_size: int
    bos: str
    block_hashes: list[str]
    skipped_blocks: int
    python: str
    modality: str = "text"
    preprocessing: str = ""
    named_set: str = ""
    set_sha256: str = ""
    licence: str = ""
    shared_blocks: int = 0
    warnings: list[str] = field(default_factory=list)
