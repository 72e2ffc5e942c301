"""Words from which texts are made."""

import random

_ADJECTIVES = """
able amber ancient autumn bold brave brief bright broad calm careful clean clear clever cold cool crisp curious
damp daring dark deep distant dry dusty eager early easy even faint fair famous fast fierce fine firm fond frank
fresh gentle giant glad golden grand grave green happy hardy heavy hidden honest humble idle jolly keen kind large
late lean light little lively lonely loud loyal lucky mellow mild modest narrow neat nimble noble odd open orange
pale patient plain polite proud purple quick quiet rapid rare ready rich rough round royal rustic scarlet sharp shy
silent silver simple sleepy slow small smooth soft solid spare steady steep stern still strong subtle sudden sunny
sweet swift tall tame tender thin tidy tiny vast vivid warm weary wide wild wise young
"""
_NOUNS = """
acorn anchor apple arrow badge bakery barn basket beacon bell bench berry bishop blanket boat bottle branch bridge
brook bucket butter button cabin candle canyon carpet castle cellar chapel cherry circle cliff clock cloud coast
copper corner cotton cradle creek cricket crystal desert dinner doctor donkey drawer eagle engine falcon farmer
feather fence fiddle finger flame flower forest fountain garden ginger glacier glove grape hammer harbor hazel
helmet hill honey horse island jacket kettle ladder lantern lemon letter lizard magnet maple marble market meadow
mirror monkey mountain needle nephew oven owl paddle palace parrot pebble pencil pepper pillow planet pocket potato
puzzle rabbit raven ribbon river rocket saddle sailor salmon school shadow spider spoon squirrel stable station
summer table teapot temple thunder ticket timber tower trumpet tunnel turtle valley velvet village violin wagon
walnut whistle willow window winter
"""
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()


def compound(draw: random.Random, parts: int = 2) -> str:
    """Draws a word such as `calm-owl`, of a number of parts the last of which is a noun."""
    return "-".join([*(draw.choice(ADJECTIVES) for _ in range(parts - 1)), draw.choice(NOUNS)])


def different_words(draw: random.Random, count: int) -> list[str]:
    """Draws different words, in a random order. Beyond the words of this module they are made of syllables."""
    words = dict.fromkeys([*ADJECTIVES, *NOUNS])
    while len(words) < count:
        words["".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(4))] = None
    return draw.sample(list(words), count)
