"""One protocol of measurements, and one resumable sweep of them."""
