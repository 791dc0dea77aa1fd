"""Load the five data sets of Zhang, Zheng, Mou and Wang (2017), with published results.

Nothing in this module is fitted to the data. The module declares all categories and
ranges. Categories that are not listed are dropped, and numbers outside their range are
clipped. Categorical columns become one-hot, numbers are scaled to [0, 1], and a
constant 1 is added for the intercept. Every row is divided by the square root of the
number of columns that the row came from, so that its norm is at most 1.
"""

import csv
import dataclasses
import pathlib

import numpy as np

EDUCATION = (
    "10th 11th 12th 1st-4th 5th-6th 7th-8th 9th Assoc-acdm Assoc-voc Bachelors "
    "Doctorate HS-grad Masters Preschool Prof-school Some-college"
)
COUNTRIES = (
    "? Cambodia Canada China Columbia Cuba Dominican-Republic Ecuador El-Salvador "
    "England France Germany Greece Guatemala Haiti Holand-Netherlands Honduras Hong "
    "Hungary India Iran Ireland Italy Jamaica Japan Laos Mexico Nicaragua "
    "Outlying-US(Guam-USVI-etc) Peru Philippines Poland Portugal Puerto-Rico Scotland "
    "South Taiwan Thailand Trinadad&Tobago United-States Vietnam Yugoslavia"
)
OCCUPATIONS = (
    "? Adm-clerical Armed-Forces Craft-repair Exec-managerial Farming-fishing "
    "Handlers-cleaners Machine-op-inspct Other-service Priv-house-serv Prof-specialty "
    "Protective-serv Sales Tech-support Transport-moving"
)
JOBS = (
    "admin. blue-collar entrepreneur housemaid management retired self-employed "
    "services student technician unemployed unknown"
)


def numbers(first, last):
    """Return the whole numbers from first to last, as strings."""
    return tuple(str(i) for i in range(first, last + 1))


def words(text):
    """Split a text into categories at spaces."""
    return tuple(text.split())


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set: its files, its columns, its label, and its published results.

    `columns` maps a name to a pair of numbers (a range) or to categories. `strong` is μ
    for the second half of the published rows. `printed` holds, for each (μ, ε), the
    error of output perturbation, that of private SGD (Bassily et al.), and both run
    times in seconds, from Table 3.
    """

    name: str
    files: tuple[str, ...]
    columns: dict
    label: str
    positive: str | None
    radius: float
    strong: float
    printed: tuple
    delimiter: str = ","


BANK = DataSet(
    name="Bank",
    files=("bank-full.csv",),
    columns={
        "age": (0, 100),
        "job": words(JOBS),
        "marital": words("divorced married single"),
        "education": words("primary secondary tertiary unknown"),
        "balance": (-10_000, 110_000),
        "housing": words("no yes"),
        "loan": words("no yes"),
        "duration": (0, 5000),
        "campaign": (0, 64),
        "pdays": (-1, 900),
        "previous": (0, 300),
    },
    label="y",
    positive="yes",
    radius=10.0,
    strong=0.1,
    printed=(
        (0.3983, 2.2552, 12.613, 518.67),
        (0.2231, 1.4585, 36.796, 519.33),
        (0.1459, 1.0203, 58.305, 519.02),
        (0.0838, 0.7824, 92.501, 518.27),
        (0.2566, 0.4829, 20.483, 518.03),
        (0.0106, 0.4090, 40.541, 519.44),
        (0.0025, 0.3387, 49.311, 516.73),
        (0.0005, 0.2475, 57.947, 520.17),
    ),
)
ADULT = DataSet(
    name="Adult",
    files=("adult.data",),
    columns={
        "age": (0, 100),
        "workclass": words(
            "? Federal-gov Local-gov Never-worked Private Self-emp-inc "
            "Self-emp-not-inc State-gov Without-pay"
        ),
        "fnlwgt": (0, 1_500_000),
        "education": words(EDUCATION),
        "education-num": (0, 16),
        "marital-status": words(
            "Divorced Married-AF-spouse Married-civ-spouse Married-spouse-absent "
            "Never-married Separated Widowed"
        ),
        "occupation": words(OCCUPATIONS),
        "relationship": words(
            "Husband Not-in-family Other-relative Own-child Unmarried Wife"
        ),
        "race": words("Amer-Indian-Eskimo Asian-Pac-Islander Black Other White"),
        "sex": words("Female Male"),
        "capital-gain": (0, 100_000),
        "capital-loss": (0, 5000),
        "hours-per-week": (0, 100),
        "native-country": words(COUNTRIES),
    },
    label="Salary",
    positive=">50K",
    radius=10.0,
    strong=0.1,
    printed=(
        (0.0499, 0.6229, 23.813, 250.50),
        (0.0208, 0.6081, 69.536, 254.14),
        (0.0122, 0.4781, 110.20, 254.18),
        (0.0065, 0.3691, 175.01, 253.72),
        (3.2039, 5.2166, 112.09, 256.70),
        (0.1287, 5.1532, 193.98, 255.36),
        (0.0309, 5.1148, 229.23, 255.69),
        (0.0080, 5.1009, 264.23, 257.23),
    ),
)
CREDIT = DataSet(
    name="CreditCard",
    files=("credit-card.csv",),
    columns={
        "LIMIT_BAL": (0, 1_000_000),
        "SEX": numbers(1, 2),
        "EDUCATION": numbers(0, 6),
        "MARRIAGE": numbers(0, 3),
        "AGE": (0, 100),
        **{f"PAY_{i}": (-2, 9) for i in (0, 2, 3, 4, 5, 6)},
        **{f"BILL_AMT{i}": (-400_000, 1_700_000) for i in range(1, 7)},
        **{f"PAY_AMT{i}": (0, 1_700_000) for i in range(1, 7)},
    },
    label="default.payment.next.month",
    positive="1",
    radius=10.0,
    strong=0.1,
    printed=(
        (0.0293, 0.4106, 4.9595, 190.30),
        (0.0102, 0.4220, 14.591, 190.89),
        (0.0053, 0.3140, 22.983, 188.67),
        (0.0024, 0.2708, 36.721, 188.86),
        (0.3643, 1.3271, 13.664, 190.36),
        (0.0141, 1.2973, 22.012, 189.97),
        (0.0035, 1.2792, 25.743, 188.81),
        (0.0008, 1.2501, 29.256, 187.97),
    ),
)
WINE = DataSet(
    name="Wine",
    files=("winequality-red.csv", "winequality-white.csv"),
    columns={
        "fixed acidity": (0, 20),
        "volatile acidity": (0, 2),
        "citric acid": (0, 2),
        "residual sugar": (0, 70),
        "chlorides": (0, 1),
        "free sulfur dioxide": (0, 300),
        "total sulfur dioxide": (0, 450),
        "density": (0.98, 1.04),
        "pH": (2.5, 4.5),
        "sulphates": (0, 2.5),
        "alcohol": (0, 20),
        "file": (0, 1),
    },
    label="quality",
    positive=None,
    radius=10.0,  # the quality is between 0 and 10
    strong=0.5,
    printed=(
        (0.6061, 6.1755, 0.1672, 6.3859),
        (0.2487, 4.1900, 0.4328, 6.3828),
        (0.1713, 3.0972, 0.7469, 6.4234),
        (0.1110, 1.3609, 1.1719, 6.3016),
        (1.0842, 8.2900, 0.0922, 6.4328),
        (0.0364, 7.9584, 0.1437, 6.3625),
        (0.0101, 6.5471, 0.1891, 6.5391),
        (0.0024, 5.3811, 0.1812, 6.4484),
    ),
)
BIKE = DataSet(
    name="Bike",
    files=("bike-hour.csv",),
    columns={
        "season": numbers(1, 4),
        "year": numbers(0, 1),
        "month": numbers(1, 12),
        "hour": numbers(0, 23),
        "holiday": numbers(0, 1),
        "weekday": numbers(0, 6),
        "workingday": numbers(0, 1),
        "weathersit": numbers(1, 4),
        "temp": (0, 1),
        "feelingTemp": (0, 1),
        "humidity": (0, 1),
        "windspeed": (0, 1),
    },
    label="count",
    positive=None,
    radius=300.0,  # rentals in an hour
    strong=0.5,
    printed=(
        (5.4659, 35.279, 0.1531, 6.4953),
        (4.0404, 30.822, 0.4375, 6.2375),
        (3.2768, 27.196, 0.6922, 6.2734),
        (2.4081, 23.865, 1.1766, 6.3969),
        (0.0555, 3.0770, 0.1031, 6.5766),
        (0.0301, 3.0448, 0.1578, 6.5094),
        (0.0242, 2.1792, 0.1625, 6.4094),
        (0.0232, 1.0406, 0.1984, 6.3625),
    ),
)
DATA_SETS = (BANK, ADULT, CREDIT, WINE, BIKE)


def read(data_set, folder):
    """Read the rows of all files as dictionaries; "file" is the file's number."""
    rows = []
    for number, name in enumerate(data_set.files):
        with (pathlib.Path(folder) / name).open(newline="") as file:
            lines = list(csv.reader(file, skipinitialspace=True))
        header = [name.strip() for name in lines[0]]
        for line in lines[1:]:
            if line:
                row = dict(zip(header, (x.strip() for x in line), strict=True))
                rows.append({**row, "file": str(number)})
    return rows


def load(data_set, folder):
    """Return features f32[n, d] in the unit ball and labels f32[n]."""
    rows = read(data_set, folder)
    parts = [np.ones((len(rows), 1))]
    for column, domain in data_set.columns.items():
        values = [row[column] for row in rows]
        if isinstance(domain[0], str):
            place = {category: i for i, category in enumerate(domain)}
            one_hot = np.zeros((len(rows), len(domain)))
            for i, value in enumerate(values):
                if value in place:
                    one_hot[i, place[value]] = 1
            parts.append(one_hot)
        else:
            low, high = domain
            scaled = (np.array(values, np.float64) - low) / (high - low)
            parts.append(np.clip(scaled, 0, 1)[:, None])
    features = np.concatenate(parts, axis=1) / np.sqrt(len(parts))
    labels = [row[data_set.label] for row in rows]
    if data_set.positive is None:
        target = np.array(labels, np.float64)
    else:
        target = np.where(np.array(labels) == data_set.positive, 1.0, -1.0)
    order = np.random.default_rng(0).permutation(len(rows))  # independent of the data
    return features[order].astype(np.float32), target[order].astype(np.float32)
