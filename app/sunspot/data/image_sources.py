"""Opens the images of DATASET and TEST_DATASET: the bundled digits, MNIST, or image files."""

from sunspot.data.image_table import open_image_splits, open_sample
from sunspot.data.mnist import open_mnist
from sunspot.data.source import Source, check_labels_match, predicting_model
from sunspot.settings import Settings


def find_sources(settings: Settings) -> tuple[Source, Source | None]:
    """Open the training rows of DATASET and the held-out rows, if any.

    Raises `DataError` or `StorageError` for any fault that can be found before training.
    """
    model = predicting_model(settings)
    train: Source
    test: Source | None
    if settings.dataset == "sample":
        train, test = open_sample()
    elif settings.dataset == "mnist":
        train, test = open_mnist(settings.data_root)
    else:
        train, test = open_image_splits(settings.dataset, settings.test_dataset, settings.image_size, model)
    if test and model is None:
        check_labels_match(train, test)
    return train, test
