"""The closed vocabulary of the generated encyclopedia, and a word-level tokenizer of it.

Every name is two words of POOLS.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from calibadv_jax.core.tags import TAGS, Grammar

_words = str.split


def _joined(starts: str, ends: str) -> list[str]:
    return [start + end for start in starts.split() for end in ends.split()]


POOLS: dict[str, tuple[list[str], list[str]]] = {
    "person": (
        _joined("ada bru cor del eli fen gia hal ivo jun", "ra len mo vin sia dor"),
        _joined("alm berk cald dorn esk falk grim holm isk jarn", "son ova etti mann ski quist"),
    ),
    "city": (
        _words(
            "port new old east west upper lower saint mount lake fort north south great little grey white"
            " high low far long deep still bright cold dry broad stone holy royal"
        ),
        _words(
            "ashford barwick calhaven dunmere elton farrow glenby harwell inverley kelstead lindale marwood"
            " norbury oakhurst penrith quenton rosedale selby tarnow ulverton verdale wexham yarrow zellin"
            " arden bexley corfe dalby emsworth frome"
        ),
    ),
    "company": (
        _words(
            "amber atlas aurora beacon cedar cobalt comet copper crystal delta eagle ember falcon granite"
            " harbor helix indigo ivory jade juniper lantern lotus magnet maple meteor nova oasis onyx opal"
            " orbit pioneer quartz raven sapphire summit titan topaz vector willow zenith"
        ),
        _words(
            "airlines bakery bank books brewery cement chemicals clinics coffee dairy diamonds drones energy"
            " fabrics films foods forge freight furniture games glass gold insurance labs lumber media mills"
            " motors optics paints paper pharma press rail robotics shipping steel studios toys wines"
        ),
    ),
    "work": (
        _words(
            "silent golden broken hidden burning frozen secret velvet crimson hollow endless wandering"
            " forgotten sleeping scarlet distant drifting midnight winter summer autumn"
        ),
        _words(
            "garden river mirror voyage promise orchard letters tide kingdom shadow bridge harvest island"
            " whisper crown compass carnival horizon sonata labyrinth"
        ),
    ),
}

# Only in a world with pages: two of these words are the address of a page.
ADDRESSES = (
    _words(
        "alpha bravo charlie echo foxtrot hotel india juliet kilo lima mike november oscar papa quebec romeo"
        " sierra tango uniform victor whiskey xray yankee zulu"
    ),
    _words(
        "acorn basil clover daisy elder fern ginger hazel iris jasmine kale laurel mint nettle olive poppy"
        " quince rose sage thyme violet walnut yew zinnia"
    ),
)
PAGE_WORDS = ["page", *ADDRESSES[0], *ADDRESSES[1]]

# Only in a world that asks for ages: too many pairs of years to learn their differences by heart.
BIRTHS, AGES = range(1700, 1810), range(20, 90)
YEARS = range(BIRTHS.start, BIRTHS[-1] + AGES[-1] + 1)
AGE_WORDS = [*_words("how old did become became born died"), *map(str, AGES), *map(str, YEARS)]

FUNCTION_WORDS = _words(
    "a an and are at author based by city company do does find for founded founder from"
    " has i in is it live lives mayor no not of same that the they to was were"
    " where who work works wrote written yes"
    # The observation's frame and the invalid-action notice of the agent loop.
    " Doc Title Question My previous action invalid If I want search should put query between give"
    " final answer Let me try again"
)

PUNCTUATION = ["(", ")", ":", '"', '")', '("', ".", ",", "?", "!", "'", "-", *"0123456789"]


EOS, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<unk>"


def build_word_tokenizer(pages: bool = False, ages: bool = False) -> Any:
    """Return a tokenizer with a token for each word, punctuation mark and protocol tag.

    Unknown words become ``<unk>``. Decoding joins tokens with single spaces, so encoding the result
    gives the same ids again.

    Args:
        pages: adds the words and tags of a world with pages.
        ages: adds the words and tags of a world that asks for ages.
    """
    actions = [*(["access"] if pages else []), *(["calculate"] if ages else [])]
    more_tags = [tag for tag in Grammar(tuple(actions)).tags if tag not in TAGS]
    more_words = [*(PAGE_WORDS if pages else []), *(AGE_WORDS if ages else []), *more_tags]
    pools = [word for pair in POOLS.values() for pool in pair for word in pool]
    words = dict.fromkeys([PAD, EOS, UNKNOWN, *TAGS, *PUNCTUATION, *FUNCTION_WORDS, *pools, *more_words])
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in (*TAGS, *more_tags)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
