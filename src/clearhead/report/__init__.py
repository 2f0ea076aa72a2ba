"""Tables, figures and HTML pages from records. Nothing here trains or measures."""

from clearhead.records.loading import load as load
from clearhead.report.comparison import page_of as page_of
from clearhead.report.page import Page as Page
from clearhead.report.page import render as render
from clearhead.report.page import to_console as to_console
