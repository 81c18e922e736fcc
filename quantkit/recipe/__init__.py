"""What to quantize and how, and its one-line name: `Recipe.parse` and `str` are inverses.

The grammar, which options only append to:

    recipe      = "none" | part { "+" part }            each kind of part at most once
    part        = linear | format | logits | qk | probs | kv

    linear      = "w" BITS [ "a" BITS ] { ":" option }  weights and inputs of linear layers,
                | "a" BITS { ":" option }               2 to 16 bits
      of weights      "group" SIZE                      what shares a scale (default: an output
                                                        channel, or what calibrated ranges have)
      of inputs       "tensor" | "token"                what shares a range (default tensor)
                      "static" | "dynamic"              (default static; dynamic for token)
                      "asymmetric" | "symmetric"        (default asymmetric)

    format      = "llm-int8" [ ":" THRESHOLD ]          weights as bitsandbytes keeps them:
                | "nf4" [ ":group" SIZE ]               LLM.int8 (default threshold 6), and 4-bit
                | "fp4" [ ":group" SIZE ]               blocks (default 64); stands in for "w"

    logits      = "logits" BITS { ":" option }          attention logits, 2 to 15
                      "tensor" | "head" | "row"         (default tensor)
                      "dynamic" | "static"              (default dynamic)
                      "symmetric" | "asymmetric"        (default symmetric)

    qk          = "qk" BITS { ":" option }              queries and keys, 2 to 15, dynamic
                      "token" | "head" | "tensor"       (default token)
                      "smooth"                          keys without their mean over the tokens

    probs       = "probs" BITS { ":" option }           softmax outputs, 2 to 15
                      "unit" | "dynamic" | "static"     (default unit: the range is [0, 1])
                      "tensor" | "head" | "row"         of dynamic (default row) and static (head)

    kv          = "kv" BITS { ":" option }              keys and values that a cache holds, 2 to 15
                      "token" | "head" | "tensor"       (default token; static: head)
                      "dynamic" | "static"              (default dynamic)
                      "asymmetric" | "symmetric"        (default asymmetric)

Examples: `none`, `w8a8`, `w8a16`, `w4a16:group64`, `w8a8:token`, `logits6`, `w8a8+logits4:head`,
`logits4:tensor:static`, `logits8:head:static:asymmetric`, `nf4+kv8`, `qk8:smooth+probs8`.

The grids behind the names are fixed, so that a name says everything:

* symmetric grids are narrow, `q` in `[-(2^(b-1)-1), 2^(b-1)-1]`, and reach to the absmax;
  asymmetric ones span lo, hi and 0 with all integers of the signed type. Softmax outputs, which
  are never negative, have all 2^b integers from 0 on.
* weights are symmetric; a channel is an output channel, a group is SIZE consecutive inputs of one.
  Ranges of weights from a calibration take the place of the absmax.
* one scale belongs to one layer and one sequence, never to a batch: `tensor` is that, `head` adds
  the (key) head, `token` and `row` the token, which in attention have a scale for each head too.
  Maps of a differential head have their own. Inputs of linear layers have no heads.
* `dynamic` takes the extremes of the valid entries of the call, `static` those of `ranges.json`.
* logits are quantized before the mask and after the model's own scale.
"""

from quantkit.recipe.attention import (
    CACHE_GRANULARITIES,
    PROBABILITY_GRANULARITIES,
    PROBABILITY_RANGES,
    QUERY_KEY_GRANULARITIES,
    CacheQuant,
    ProbabilityQuant,
    QueryKeyQuant,
)
from quantkit.recipe.linear import (
    ACTIVATION_GRANULARITIES,
    FORMATS,
    ActivationQuant,
    BitsAndBytes,
    WeightQuant,
)
from quantkit.recipe.logits import (
    LOGIT_GRANULARITIES,
    LOGIT_GRIDS,
    RANGE_KINDS,
    UNQUANTIZED_BITS,
    LogitQuant,
)
from quantkit.recipe.recipe import Recipe

__all__ = [
    "ACTIVATION_GRANULARITIES",
    "CACHE_GRANULARITIES",
    "FORMATS",
    "LOGIT_GRANULARITIES",
    "LOGIT_GRIDS",
    "PROBABILITY_GRANULARITIES",
    "PROBABILITY_RANGES",
    "QUERY_KEY_GRANULARITIES",
    "RANGE_KINDS",
    "UNQUANTIZED_BITS",
    "ActivationQuant",
    "BitsAndBytes",
    "CacheQuant",
    "LogitQuant",
    "ProbabilityQuant",
    "QueryKeyQuant",
    "Recipe",
    "WeightQuant",
]
