"""What runs have recorded, and the page that shows it."""

from lightning_sparsecomm.report.page import page as page
from lightning_sparsecomm.report.page import write_report as write_report
from lightning_sparsecomm.report.run import Point as Point
from lightning_sparsecomm.report.run import Run as Run
