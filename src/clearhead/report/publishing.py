"""Records to the page of their study."""

from clearhead.errors import ClearheadError
from clearhead.records.runs import DIAGNOSIS, QUANTIZATION, Records
from clearhead.report import comparison, diagnosis, quantization
from clearhead.report.narrative import title_of
from clearhead.report.page import Page


def page_of(records: Records, title: str = "") -> Page:
    """The page of records of one study.

    Args:
        title: unless given, the models' names.

    Raises:
        ClearheadError: records of several studies, or of a quantisation without full precision.
    """
    studies = list(dict.fromkeys(run.study for run in records.runs))
    if len(studies) > 1:
        raise ClearheadError(
            "records of runs, of diagnoses and of quantisations do not share a page: give each "
            f"kind by itself; found {' and '.join(studies)}"
        )
    pages = {DIAGNOSIS: diagnosis.page, QUANTIZATION: quantization.page}
    make = pages.get(studies[0], comparison.page) if studies else comparison.page
    return make(records, title or title_of(records))
