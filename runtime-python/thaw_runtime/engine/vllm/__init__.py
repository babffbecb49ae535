"""The engine on vLLM.  No other folder knows vLLM; docs/pipeline.md lists the files of this one.

To upgrade vLLM, change the locks and ``WRITTEN_FOR`` in vllm_names.py.  If the new version lacks a name of the table
there, an engine does not start, and its error says which name.  Then change the file that uses the name, and the table.
"""
