"""Memory → cache blocks, and what fits into them. Pure integers.

A block holds the keys and values of `page_size` tokens for all layers. The cache must hold the longest sequence that is
let in, or that one could never run.
"""

from dataclasses import dataclass

from handlers.config import ConfigError

PAGE_SIZE = {"cpu": 32, "cuda": 256}
BATCH_TOKENS = {"cpu": 256, "cuda": 8192}
CPU_BUDGET_GIB = 2.0
SMALLEST_PAGE = 4  # tokens; transformers' own bound
USUAL_TOKENS = 512  # of a request, prompt and answer: ShareGPT's conversations have about as many a turn
MOST_SLOTS = 256
QUEUE_PER_SLOT = 4


@dataclass(frozen=True)
class Geometry:
    """What the cache is made of.

    Args:
        layers, kv_heads, head_dim: of the model.
        bytes_per_value: 4 for float32, 2 for the half-precision ones.
        positions: most tokens that the model knows positions for; None for no such limit.
    """

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int
    positions: int | None

    def block_bytes(self, page_size: int) -> int:
        """Bytes of one block: keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value * page_size


@dataclass(frozen=True)
class Sizes:
    """An engine's sizes.

    Args:
        page_size: tokens in a block.
        blocks: how many.
        max_model_len: most tokens of one sequence.
        max_batch_tokens: tokens that one step computes.
    """

    page_size: int
    blocks: int
    max_model_len: int
    max_batch_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens in the whole cache."""
        return self.page_size * self.blocks

    @property
    def batch_size(self) -> int:
        """TorchServe's batchSize that suits the cache: as many usual requests as it holds, a token of each a step."""
        usual = -(-min(self.max_model_len, USUAL_TOKENS) // self.page_size)
        return max(1, min(self.blocks // usual, self.max_batch_tokens, MOST_SLOTS))

    @property
    def queue(self) -> int:
        """Requests that may wait for a slot: what comes beyond is refused at once rather than late."""
        return QUEUE_PER_SLOT * self.batch_size

    @property
    def longest_at_once(self) -> int:
        """Sequences of the greatest length that fit side by side."""
        return max(1, self.blocks // -(-self.max_model_len // self.page_size))


def sizes(
    geometry: Geometry,
    device: str,
    budget: int,
    *,
    page_size: int | None = None,
    num_blocks: int | None = None,
    max_model_len: int | None = None,
    max_batch_tokens: int | None = None,
    slots: int = 1,
) -> Sizes:
    """Find an engine's sizes.

    Args:
        geometry: the model's.
        device: `cpu` or `cuda`.
        budget: bytes for the cache.
        page_size, num_blocks, max_model_len, max_batch_tokens: what was asked for; None for the defaults.
        slots: requests that TorchServe hands over at once.

    Raises:
        ConfigError: impossible, with what would be possible.
    """
    page = page_size or PAGE_SIZE.get(device, PAGE_SIZE["cpu"])
    if page < SMALLEST_PAGE:
        raise ConfigError(f"handler: page_size is {page}; it must be at least {SMALLEST_PAGE}")
    batch_tokens = max_batch_tokens or BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"])
    if batch_tokens < slots:
        raise ConfigError(
            f"handler: max_batch_tokens is {batch_tokens} and TorchServe's batchSize is {slots}: a step could not give "
            f"each request its token; set max_batch_tokens to at least {slots}, or batchSize to at most {batch_tokens}"
        )
    each = geometry.block_bytes(page)
    blocks = num_blocks or budget // each
    if blocks < 1:
        raise ConfigError(
            f"handler: the cache's {budget / 2**30:.2f} GiB hold no block of {page} tokens ({each} bytes each); "
            "set cache_gib higher, or page_size lower"
        )
    capacity = blocks * page
    if max_model_len is None:
        length = min(capacity, geometry.positions or capacity)
    elif geometry.positions is not None and max_model_len > geometry.positions:
        raise ConfigError(
            f"handler: max_model_len is {max_model_len} and the model has {geometry.positions} positions; set at most "
            f"{geometry.positions}"
        )
    elif max_model_len > capacity:
        need = -(-max_model_len // page)
        raise ConfigError(
            f"handler: max_model_len is {max_model_len} and the cache holds {capacity} tokens; set max_model_len to at "
            f"most {capacity}, or num_blocks to at least {need} (cache_gib to {need * each / 2**30:.2f})"
        )
    else:
        length = max_model_len
    if length < 2:
        raise ConfigError(f"handler: max_model_len is {length}; a prompt and an answer need at least 2 tokens")
    return Sizes(page, blocks, length, batch_tokens)
