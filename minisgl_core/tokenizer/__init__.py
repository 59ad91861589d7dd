"""Tokenization of prompts, detokenization, chat templates and stop strings."""

from .chat import ChatTemplate
from .decoding import ByteLevelDecoder, IncrementalDecoder, WindowDecoder
from .load import load_tokenizer, read_chat_template
from .messages import Message
from .stop import StopMatcher
from .tokenizer import Tokenizer

__all__ = [
    "ByteLevelDecoder",
    "ChatTemplate",
    "IncrementalDecoder",
    "Message",
    "StopMatcher",
    "Tokenizer",
    "WindowDecoder",
    "load_tokenizer",
    "read_chat_template",
]
