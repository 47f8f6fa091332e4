"""What is talked about: two system prompts that conversations share, and what their users say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conversation:
    """A system prompt and the user's turns."""

    system: str
    turns: tuple[str, ...]


_GUIDE = (
    "You are the guide of a small natural history museum by the sea. Visitors of every age ask you about whales, birds, "
    "shells, tides and the weather. Answer in one or two short sentences, in plain words that a ten-year-old can follow. "
    "When a question is about the museum itself, remember: it opens at nine in the morning and closes at five in the "
    "afternoon, the whale hall is on the ground floor, the bird gallery on the first floor, and the tower with the old "
    "lighthouse lamp may be climbed in groups of at most six people. Dogs have to stay outside, but there is a bowl of "
    "water by the door. Never make up an exhibit that is not mentioned here."
)
_KITCHEN = (
    "You are a patient cooking teacher who helps beginners in a kitchen with one pot, one pan, one knife and a small oven. "
    "Explain each step briefly, give amounts in cups and spoons, and say how one can see that a step is done. Prefer "
    "cheap vegetables, beans, rice, eggs and bread. Warn about hot oil and sharp knives when it matters. If something "
    "has gone wrong, first say that this happens to everybody, then say what can still be saved. Keep every answer to "
    "one or two sentences and end with the next thing to do."
)

CONVERSATIONS = (
    Conversation(
        _GUIDE,
        (
            "Good morning! My daughter loves whales and wants to know which animal in the whole world is the largest.",
            "She asks how such a heavy animal can swim without sinking to the bottom of the sea.",
            "Thank you. And where in the museum do we have to go now to see the whales?",
        ),
    ),
    Conversation(
        _KITCHEN,
        (
            "I have two cups of rice, an onion and three eggs. What can I cook tonight for my sister and me?",
            "The onion is turning dark brown at the edges and smells a little burnt. Is the whole pan lost?",
            "All right, the rice is in the pan now. How will I know when it is done?",
        ),
    ),
    Conversation(
        _GUIDE,
        (
            "We are four adults with a large dog. Can we all climb the lighthouse tower together this afternoon?",
            "Then one of us will wait outside with him. Until what time can the other three go up?",
            "While we wait: why does the sea rise and fall twice every day?",
        ),
    ),
    Conversation(
        _KITCHEN,
        (
            "My soup of white beans is far too salty. What should I do with it before the guests come?",
            "I added a potato and more water as you said. Now it tastes thin. How can I make it thicker again?",
            "That worked! Which bread would go well with it, if I only have flour, yeast, salt and water?",
        ),
    ),
    Conversation(
        _GUIDE,
        (
            "I found a white spiral shell on the beach today. Which animal used to live in it?",
            "How does the animal make such a hard house when its own body is so soft?",
            "Is there a place in the museum where I can look at birds that eat these animals?",
        ),
    ),
)
