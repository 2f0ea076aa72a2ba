"""The viewer: attention, hidden states and predictions of one text, on a page to click through."""

from clearhead.view.observation import Observation as Observation
from clearhead.view.observation import observe_text as observe_text
from clearhead.view.observation import render as render
