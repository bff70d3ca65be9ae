"""Tests of pictures.py: python3 extras/measure/pictures_test.py, after make build/cpu/measure"""
import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET

root = os.getcwd()
venv = os.path.join(root, "build/pictures_venv/bin/python")
python = venv if os.path.exists(venv) else sys.executable
script = os.path.join(root, "extras/measure/pictures.py")
without_matplotlib = ("import sys, runpy; sys.modules['matplotlib'] = None; "
                      f"sys.argv = sys.argv[1:]; runpy.run_path({script!r}, run_name='__main__')")
four_rows = """# lenet, batch 2, 2 devices, naive: 9 us
# a note
device,lane,stream,kind,name,begin,end,src,dst,bytes,critical,cause
0,0,computation,backward,relu_kernel,0,5000,-2,-2,8,1,-1
1,1,computation,backward,relu_kernel,0,3000,-2,-2,8,0,-1
1,1,computation,wait,wait,3000,5000,-2,-2,0,0,0
1,1,from gpu(0),message,W3,5000,9000,0,1,4,1,0
"""


class Pictures(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, root)
        os.chdir(folder.name)
        os.mkdir("build")

    def file(self, path, text):
        with open(path, "w") as file:
            file.write(text)

    def call(self, *words):
        """What a call prints, which must succeed."""
        run = subprocess.run([python, script, *words], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        return run.stdout

    def refused(self, *words):
        """What a call says, which must fail with one line."""
        run = subprocess.run([python, script, *words], capture_output=True, text=True)
        self.assertEqual(run.returncode, 1)
        self.assertEqual(run.stderr.count("\n"), 1, run.stderr)
        return run.stderr.strip()

    def texts(self, path):
        """All texts of a picture that suits dark pages, too."""
        tree = ET.parse(path)
        texts = ["".join(element.itertext()).strip() for element in tree.iter()
                 if element.tag.endswith(("}text", "}title", "}style"))]
        self.assertTrue(any("prefers-color-scheme: dark" in text for text in texts))
        return texts

    def test_accuracy(self):
        self.file("a.csv", "epoch,loss,test_acc,seconds,model,gpus,allreduce,lr\n"
                           "1,2.3,0.1,4,lenet,2,ring,0.2\n2,1.5,0.6,4,lenet,2,ring,0.2\n")
        self.file("b.csv", "epoch,loss,test_acc,seconds\n1,nan,0.1,4\n")
        self.assertEqual(self.call("accuracy", "RUNS=a.csv b.csv"),
                         "build/plot.svg\nbuild/plot.png\n")
        texts = self.texts("build/plot.svg")
        for text in ("test accuracy", "train loss", "a.csv: lenet, GPUS=2, ring, lr 0.2", "b.csv"):
            self.assertIn(text, texts)
        self.file("build/log.csv", "epoch,loss,test_acc,seconds\n")
        self.assertEqual(self.refused("accuracy"),
                         "no picture of build/log.csv: it has no rows (make run)")
        self.assertEqual(self.refused("accuracy", "RUNS=a.csv no.csv"),
                         "no picture of no.csv: it cannot be read (make run)")
        self.assertEqual(self.refused("accuracy", "LR=1"),
                         "make plot takes only RUNS and LOG, not LR")

    def test_without_matplotlib(self):
        self.file("a.csv", "epoch,loss,test_acc,seconds\n1,2.3,0.1,4\n")
        call = [python, "-c", without_matplotlib, script]
        run = subprocess.run(call + ["accuracy", "LOG=a.csv"], capture_output=True, text=True)
        self.assertEqual(run.stdout, "a.csv\n epoch      loss  test_acc\n"
                                     "     1       2.3       0.1\n")
        run = subprocess.run(call + ["scale"], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stdout), (0, ""))
        self.assertEqual(run.stderr, "no picture: matplotlib is missing: apt-get install "
                                     "python3-matplotlib, or make pictures_venv\n")

    def test_scale(self):
        self.file("build/scale.csv", "k,strong_ms,strong,weak_ms,weak\n1,5,1,5,1\n2,3,0.83,6,0.83\n")
        self.assertEqual(self.call("scale"), "build/scale.svg\n")
        for text in ("a step on k devices, predicted", "strong", "weak"):
            self.assertIn(text, self.texts("build/scale.svg"))

    def test_trace_says_what_it_shows(self):
        self.file("rows", four_rows)
        self.assertEqual(self.call("trace", "rows"), "build/trace.json\nbuild/trace.svg\n")
        texts = self.texts("build/trace.svg")
        for text in ("gpu(0) computes", "gpu(1) receives from gpu(0)", "W3", "a note",
                     "microseconds", "W3 from gpu(0) to gpu(1), message: begins at 0.0050 ms, "
                     "takes 4.0 us, 4 bytes; has waited for relu_kernel on gpu(0)"):
            self.assertIn(text, texts)
        self.assertNotIn("input", texts)
        self.assertEqual(self.refused("trace", "no"),
                         "no picture of no: it cannot be read (make trace)")

    def test_trace_json(self):
        """Slices of a thread do not overlap, and arrows lead from a sender's to a receiver's."""
        for fabric in ([], ["FABRIC=nvlink"], ["FABRIC=ethernet10"], ["FABRIC=300,0.03"]):
            with self.subTest(fabric):
                subprocess.run([f"{root}/build/cpu/measure", "trace", "GPUS=3", "ALLREDUCE=ring",
                                "OVERLAP=1", "BATCH=6", "LIMIT=6", "STEPS=1",
                                f"DATA={root}/build/data", *fabric], capture_output=True, check=True)
                self.call("trace", "build/trace.csv")
                with open("build/trace.json") as file:
                    trace = json.load(file)
                self.assertIn("lenet, batch 6, 3 devices, ring", trace["otherData"]["title"])
                self.check_events(trace["traceEvents"])

    def check_events(self, events):
        self.assertEqual({e["ph"] for e in events}, set("XsfM"))
        for e in events:
            self.assertTrue(e["ph"] == "M" or e["ts"] >= 0 and e.get("dur", 0) >= 0, e)
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events
                 if e["name"] == "thread_name"}
        slices = {}
        for e in events:
            if e["ph"] == "X":
                begin, takes = round(1000 * e["ts"]), round(1000 * e["dur"])
                slices.setdefault((e["pid"], e["tid"]), []).append((begin, begin + takes))
        for thread, times in slices.items():
            self.assertIn(thread, names)
            times.sort()
            for (_, end), (begin, _) in zip(times, times[1:]):
                self.assertLessEqual(end, begin, names[thread])
        begins = {e["id"]: e for e in events if e["ph"] == "s"}
        ends = {e["id"]: e for e in events if e["ph"] == "f"}
        self.assertEqual(begins.keys(), ends.keys())
        messages = sum(e["ph"] == "X" and e["cat"] == "message" for e in events)
        self.assertEqual(messages, 2 * len(begins))
        self.assertGreater(messages, 20)
        for number, begin in begins.items():
            for e in (begin, ends[number]):
                at = round(1000 * e["ts"])
                self.assertTrue(any(first <= at <= last
                                    for first, last in slices[e["pid"], e["tid"]]))
            self.assertEqual(names[begin["pid"], begin["tid"]], f"to gpu({ends[number]['pid']})")
        self.assertGreater(sum(e["ph"] == "X" and e["args"]["critical"] for e in events), 5)


if __name__ == "__main__":
    unittest.main()
