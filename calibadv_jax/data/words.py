"""The closed vocabulary of the generated encyclopedia: every name is two of these words."""

from __future__ import annotations

_FIRST = "ada bru cor del eli fen gia hal ivo jun".split()
_FIRST_ENDS = "ra len mo vin sia dor".split()
_LAST = "alm berk cald dorn esk falk grim holm isk jarn".split()
_LAST_ENDS = "son ova etti mann ski quist".split()

POOLS: dict[str, tuple[list[str], list[str]]] = {
    "person": (
        [start + end for start in _FIRST for end in _FIRST_ENDS],
        [start + end for start in _LAST for end in _LAST_ENDS],
    ),
    "city": (
        "port new old east west upper lower saint mount lake fort north south great little grey white"
        " high low far long deep still bright cold dry broad stone holy royal".split(),
        "ashford barwick calhaven dunmere elton farrow glenby harwell inverley kelstead lindale marwood"
        " norbury oakhurst penrith quenton rosedale selby tarnow ulverton verdale wexham yarrow zellin"
        " arden bexley corfe dalby emsworth frome".split(),
    ),
    "company": (
        "amber atlas aurora beacon cedar cobalt comet copper crystal delta eagle ember falcon granite"
        " harbor helix indigo ivory jade juniper lantern lotus magnet maple meteor nova oasis onyx opal"
        " orbit pioneer quartz raven sapphire summit titan topaz vector willow zenith".split(),
        "airlines bakery bank books brewery cement chemicals clinics coffee dairy diamonds drones energy"
        " fabrics films foods forge freight furniture games glass gold insurance labs lumber media mills"
        " motors optics paints paper pharma press rail robotics shipping steel studios toys wines".split(),
    ),
    "work": (
        "silent golden broken hidden burning frozen secret velvet crimson hollow endless wandering"
        " forgotten sleeping scarlet distant drifting paper iron glass".split()[:17]
        + "midnight winter summer autumn".split(),
        "garden river mirror voyage promise orchard letters tide kingdom shadow bridge harvest island"
        " whisper crown compass carnival horizon sonata labyrinth".split(),
    ),
}

FUNCTION_WORDS = (
    "a an and are at author based book by city company do does employed find for founded founder from has"
    " home i in is it its lives live mayor no not of offices same started that the they to was were"
    " where who work works wrote written yes"
    # The observation's frame and the invalid-action notice of the agent loop.
    " Doc Title Question My previous action invalid If I want to search should put query between give"
    " final answer Let me try again the"
).split()

PUNCTUATION = ["(", ")", ":", '"', '")', '("', ".", ",", "?", "!", "'", "-", *"0123456789"]


def all_words() -> list[str]:
    """Every word of the vocabulary once, in a fixed order."""
    pools = [word for pair in POOLS.values() for pool in pair for word in pool]
    return list(dict.fromkeys([*PUNCTUATION, *FUNCTION_WORDS, *pools]))
